"""A stub model endpoint in the package, so that everything runs with no key and no network."""

from envbus.demo_model.endpoint import DemoModel, Fault

__all__ = ["DemoModel", "Fault"]
