"""The engines and devices of a run: which engine has which sample, and who replaces a lost one."""
