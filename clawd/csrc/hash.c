/* SPDX-License-Identifier: Apache-2.0 */
#include "hash.h"

#include <string.h>

/* SipHash-1-3 (Aumasson, Bernstein): names come from peers, who must not be able to choose collisions. */
#define ROTATE(x, b) (((x) << (b)) | ((x) >> (64 - (b))))

static void sip_round(uint64_t v[4])
{
	v[0] += v[1];
	v[1] = ROTATE(v[1], 13) ^ v[0];
	v[0] = ROTATE(v[0], 32);
	v[2] += v[3];
	v[3] = ROTATE(v[3], 16) ^ v[2];
	v[0] += v[3];
	v[3] = ROTATE(v[3], 21) ^ v[0];
	v[2] += v[1];
	v[1] = ROTATE(v[1], 17) ^ v[2];
	v[2] = ROTATE(v[2], 32);
}

uint64_t claw_hash(const uint64_t key[2], const uint8_t *data, uint32_t len)
{
	uint64_t v[4] = {
		key[0] ^ 0x736f6d6570736575, /* "somepseu" "dorandom" "lygenera" "tedbytes": the algorithm's constants */
		key[1] ^ 0x646f72616e646f6d,
		key[0] ^ 0x6c7967656e657261,
		key[1] ^ 0x7465646279746573,
	};
	uint32_t at = 0;
	for (; len - at >= 8; at += 8) {
		uint64_t word;
		memcpy(&word, data + at, 8);
		v[3] ^= word;
		sip_round(v);
		v[0] ^= word;
	}
	uint64_t word = (uint64_t)len << 56;
	for (uint32_t i = 0; at + i < len; i++)
		word |= (uint64_t)data[at + i] << (8 * i);
	v[3] ^= word;
	sip_round(v);
	v[0] ^= word;
	v[2] ^= 0xff;
	sip_round(v);
	sip_round(v);
	sip_round(v);
	return v[0] ^ v[1] ^ v[2] ^ v[3];
}
