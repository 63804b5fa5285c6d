"""The RQ task: reserve, ask for prefills, check what came, commit it."""
