"""Links carry numbered tensors over a border between two pipeline stages.

    stage s    Sender.send(number, tensor) --- messages --> Receiver --> on_arrival(number, tensor)
    stage s+1  ...the same the other way, over a link of its own

`link.py` has the interfaces of both ends. There are two kinds of links: `host_sender.py` and
`host_receiver.py` (TCP, any tensor by way of host memory; survives lost connections), and
`direct_link.py` (torch.distributed).
"""
