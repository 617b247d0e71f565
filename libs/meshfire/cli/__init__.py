"""The `meshfire` command: one file per verb. Knows no arithmetic and no service's inside."""
