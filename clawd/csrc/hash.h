/* SPDX-License-Identifier: Apache-2.0 */
#ifndef CLAW_HASH_H
#define CLAW_HASH_H

#include <stdint.h>

/* Keyed, so that peers who choose names cannot choose collisions */
uint64_t claw_hash(const uint64_t key[2], const uint8_t *data, uint32_t len);

#endif
