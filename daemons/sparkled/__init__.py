"""Sparkle's daemons, one package per process: prefetch, compute, front. A daemon never imports another daemon."""
