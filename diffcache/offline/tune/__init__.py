"""Choose a method for a pipeline: candidates, their costs, and the choice."""
