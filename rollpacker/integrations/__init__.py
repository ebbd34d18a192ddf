"""Other people's trainers and environments, one folder each."""
