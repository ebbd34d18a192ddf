"""Pipeline stages that withstand slow stages and links: plans, stages, links and simulation."""
