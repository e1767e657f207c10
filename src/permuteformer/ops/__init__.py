"""Pure functions on tensors. They import torch and nothing else of this package.

Shapes, everywhere in the package:

    b  batch            l  query length     s  key length       a  axes of a position (1 text, 2 image)
    h  heads            d  head size        m  features         v  value size
    c  chunk            n  number of chunks

Layout is ``b h l d``, as in ``scaled_dot_product_attention``, with any strides. A trailing comment (``# b h c m``)
appears only where the shape changes. Equation numbers are those of the paper.
"""
