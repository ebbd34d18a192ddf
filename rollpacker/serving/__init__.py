"""Chat completions as OpenAI's API has them: in front of a model, and for programs that train."""
