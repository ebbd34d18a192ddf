"""What a run knows of its responses' lengths, and what follows from them.

bins:         intervals (bins) of length, wider for longer responses;
counts:       number of finished and stopped responses, per prompt and bin;
model:        the policy's own length distribution: classes of prompts, each with its lengths;
fit:          finds that distribution, samples that were stopped early included;
window:       lengths of a run's last steps, with a fit that is kept up to date;
weights:      loss weights by length, as functions of a model;
debias:       loss weights of a run (`tail_batching.debias`);
factor_plan:  how much more short rounds launch than they need (`prompt_factor: auto`);
learned:      all of these together, for the job.
"""
