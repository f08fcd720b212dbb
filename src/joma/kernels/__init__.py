"""Speed code, in one place: each fast pass stands beside its plain twin, which is its oracle."""
