"""Plans of a pipeline: the next op of a stage, the split of the layers, and the watch for slow
links and stages. Nothing here does input or output."""
