# SPDX-License-Identifier: Apache-2.0
"""What touches the kernel on clawd's behalf, in a process of its own that sees no token."""
