"""Pipeline stages of a trainer that withstands slow stages and links: plans, stages, links, and
their simulation."""
