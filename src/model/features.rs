//! Feature variables (`PILOT_*` and others): read from text once, then plain data.
