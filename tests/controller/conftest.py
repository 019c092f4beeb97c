from __future__ import annotations

from fleet_fixtures import fleet, make_fleet

__all__ = ["fleet", "make_fleet"]
