from rollpacker.trainer.weight_probe import weight_probe
__all__=["weight_probe"]
