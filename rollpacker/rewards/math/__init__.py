"""Math answers: found and limited in size here, compared inside the sandbox."""
