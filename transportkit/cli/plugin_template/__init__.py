"""What `transportkit new-backend` writes, with `sketch` where the new backend's name goes; see `new_backend`.

`backend.py` is a real backend, tested and type-checked here; the documentation for authors shows it.
"""
