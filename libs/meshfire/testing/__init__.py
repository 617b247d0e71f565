"""Public testing aids: the whole model in one process, as the plain reference that a mesh is compared with."""
