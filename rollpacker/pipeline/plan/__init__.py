"""Plans of a trainer's pipeline stages: which op a stage runs next, how layers are split among the
stages, and whether a link or stage has turned slow. Nothing here does input or output."""
