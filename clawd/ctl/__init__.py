# SPDX-License-Identifier: Apache-2.0
"""`clawctl`: one file a verb, each of which collects a value that is shown as a table or as JSON."""
