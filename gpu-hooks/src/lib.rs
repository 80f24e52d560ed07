//! What GPUs a container uses, what GPUs a host has, and the plan of a checkpoint or restore.
