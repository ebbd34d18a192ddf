"""Math answers: extracted and capped here, compared inside the sandbox."""
