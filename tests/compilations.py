"""Counting what JAX compiles."""

import jax


class Compilations:
    """How many programs JAX compiles within a `with`."""

    def __enter__(self):
        self.count = 0
        jax.monitoring.register_event_duration_secs_listener(self._listen)
        return self

    def _listen(self, event, duration, **kwargs):
        self.count += event == "/jax/core/compile/backend_compile_duration"

    def __exit__(self, *exception):
        jax.monitoring.unregister_event_duration_listener(self._listen)
