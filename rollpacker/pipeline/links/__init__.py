"""Links carry numbered tensors over a border between two pipeline stages.

    stage s: Sender.send(number, tensor) --messages--> stage s+1: Receiver, which then calls
    on_arrival(number, tensor). The other way, from stage s+1 to s, goes a second link.

`link.py` has the interfaces of both ends. There are two kinds of links: `host_sender.py` and
`host_receiver.py` (TCP, any tensor by way of host memory; survives lost connections), and
`direct_link.py` (torch.distributed).
"""
