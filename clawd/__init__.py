# SPDX-License-Identifier: Apache-2.0
"""clawd relays LLM tokens from inference processes to the people reading them."""

__version__ = "0.1.0"
