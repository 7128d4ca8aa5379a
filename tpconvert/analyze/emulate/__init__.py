"""All ranks in lockstep in one process, every op compared with the recorded one."""
