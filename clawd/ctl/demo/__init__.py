# SPDX-License-Identifier: Apache-2.0
"""`scripts/demo`: a private daemon, producers in processes of their own and a client, and whether all of it arrived."""
