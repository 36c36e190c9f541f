/* SPDX-License-Identifier: Apache-2.0 */
#include <linux/if_ether.h>
