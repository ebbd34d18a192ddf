"""vLLM as an engine. vLLM has two model runners, of which the newer draws by itself and the older
is told what to draw; so there are two ways to draw and to verify, in `draws.py` and `verify.py`."""
