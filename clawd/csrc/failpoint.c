/* SPDX-License-Identifier: Apache-2.0 */
#include "failpoint.h"

#ifdef CLAW_FAILPOINTS

#include <signal.h>
#include <stdlib.h>
#include <string.h>

void claw_failpoint(const char *name)
{
	static const char *asked;
	static size_t len;
	static long left;
	if (!asked) {
		const char *given = getenv("CLAWD_FAILPOINT");
		asked = given ? given : "";
		len = strcspn(asked, ":");
		left = asked[len] ? atol(asked + len + 1) : 0;
	}
	if (left > 0 && strlen(name) == len && !memcmp(name, asked, len) && --left == 0)
		raise(SIGKILL);
}

#endif
