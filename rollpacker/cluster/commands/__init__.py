"""The actions of `rollpacker cluster`, such as serve and submit; a module has one or several."""
