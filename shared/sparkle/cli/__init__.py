"""The command lines `sparkle` (chat) and `sparkle-ctl`; each module is imported only by the command that needs it."""
