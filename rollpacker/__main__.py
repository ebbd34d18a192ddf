"""`python -m rollpacker VERB ...`: the command, where its folder is not on the PATH."""

from rollpacker.cli.main import entry

if __name__ == "__main__":
    entry()
