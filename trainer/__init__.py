"""Running a schedule: configuration, launch, executor, loop, measurement and a run's folder."""
