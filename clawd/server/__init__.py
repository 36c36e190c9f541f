# SPDX-License-Identifier: Apache-2.0
"""The daemon: what moves no token itself but decides who gets them."""
