"""`nbdist run`: a script or a notebook from its beginning to its end, without anybody who watches."""
