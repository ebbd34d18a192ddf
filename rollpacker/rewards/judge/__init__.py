"""Language models as judges: prompt, strict reading of replies, endpoints."""
