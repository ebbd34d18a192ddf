"""Chat completions as OpenAI's API has them: a server in front of a model, also for training."""
