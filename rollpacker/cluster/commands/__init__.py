"""The actions of `rollpacker cluster`."""
