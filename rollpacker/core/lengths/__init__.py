"""What a run knows of its responses' lengths, and what follows from them.

bins         lengths in bins that grow with them
counts       what launches of prompts have shown, per prompt and bin
model        the policy's own distribution: classes of prompts, each with its lengths
fit          finds that distribution, samples that were stopped early included
window       the last steps of a run, with a fit that is kept up to date
weights      loss weights by length, as functions of a model
debias       loss weights of a run (`tail_batching.debias`)
factor_plan  factors for the lengths at hand (`prompt_factor: auto`)
learned      all of these together, for the job
"""
