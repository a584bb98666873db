"""Train models on a project's labelled pictures: data, augmentation, recipe and tasks for multiring.training."""
