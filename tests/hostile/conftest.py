"""Run folders of the tests of training."""

from train.conftest import bytes_run, image_run, make_run, text_run, words_run

__all__ = ["bytes_run", "image_run", "make_run", "text_run", "words_run"]
