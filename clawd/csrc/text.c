/* SPDX-License-Identifier: Apache-2.0 */
#include "text.h"

#include "frame.h"

/* Kinds of characters */
enum {
	PLAIN, /* letters, digits, all that is nothing else. Right after a point: the word or number goes on */
	WIDE, /* likewise, but no part of a word or number */
	SPACE,
	CLOSER,
	POINT,
	MARK,
	PART, /* of a character of several bytes */
	MISSING, /* no byte at all */
};

enum {
	KIND = 0x07,
	MORE_SHIFT = 4, /* first byte of a character: how many follow, at most 3 */
	MORE = 3 << MORE_SHIFT,
	SEEMS_WIDE = 0x40, /* most characters with this first byte are WIDE, else PLAIN */
	CONTENT = 0x80, /* all characters with it are WIDE or PLAIN */
};

#define SP SPACE
#define CL CLOSER
#define PT POINT
#define MK MARK
#define CO PART
#define l2 (PART | 1 << MORE_SHIFT)
#define L2 (l2 | CONTENT)
#define w2 (l2 | SEEMS_WIDE)
#define l3 (PART | 2 << MORE_SHIFT)
#define w3 (l3 | SEEMS_WIDE)
#define W3 (w3 | CONTENT)
#define W4 (PART | 3 << MORE_SHIFT | SEEMS_WIDE | CONTENT)

static const uint8_t byte_kinds[256] = {
	/*        0   1   2   3   4   5   6   7   8   9   a   b   c   d   e   f */
	/* 00 */  0,  0,  0,  0,  0,  0,  0,  0,  0, SP, SP, SP, SP, SP,  0,  0,
	/* 10 */  0,  0,  0,  0,  0,  0,  0,  0,  0,  0,  0,  0,  0,  0,  0,  0,
	/* 20 */ SP, MK, CL,  0,  0,  0,  0, CL,  0, CL, CL,  0,  0,  0, PT,  0,
	/* 30 */  0,  0,  0,  0,  0,  0,  0,  0,  0,  0,  0,  0,  0,  0,  0, MK,
	/* 40 */  0,  0,  0,  0,  0,  0,  0,  0,  0,  0,  0,  0,  0,  0,  0,  0,
	/* 50 */  0,  0,  0,  0,  0,  0,  0,  0,  0,  0,  0,  0,  0, CL,  0,  0,
	/* 60 */  0,  0,  0,  0,  0,  0,  0,  0,  0,  0,  0,  0,  0,  0,  0,  0,
	/* 70 */  0,  0,  0,  0,  0,  0,  0,  0,  0,  0,  0,  0,  0, CL,  0,  0,
	/* 80 */ CO, CO, CO, CO, CO, CO, CO, CO, CO, CO, CO, CO, CO, CO, CO, CO,
	/* 90 */ CO, CO, CO, CO, CO, CO, CO, CO, CO, CO, CO, CO, CO, CO, CO, CO,
	/* a0 */ CO, CO, CO, CO, CO, CO, CO, CO, CO, CO, CO, CO, CO, CO, CO, CO,
	/* b0 */ CO, CO, CO, CO, CO, CO, CO, CO, CO, CO, CO, CO, CO, CO, CO, CO,
	/* c0 */  0,  0, w2, L2, L2, L2, L2, L2, L2, L2, L2, L2, L2, L2, L2, L2,
	/* d0 */ L2, L2, L2, L2, L2, L2, L2, L2, l2, L2, L2, l2, L2, L2, L2, L2,
	/* e0 */ l3, l3, w3, w3, W3, W3, W3, W3, W3, W3, W3, W3, W3, W3, W3, w3,
	/* f0 */ W4, W4, W4, W4, W4,  0,  0,  0,  0,  0,  0,  0,  0,  0,  0,  0,
};

/* The kind of a character that is not ASCII */
static uint8_t kind_of(uint32_t point)
{
	switch (point) {
	case 0x061f: case 0x06d4: /* ؟ ۔ */
	case 0x0964: case 0x0965: /* । ॥ */
	case 0x203c: case 0x203d: case 0x2047: case 0x2048: case 0x2049: /* ‼ ‽ ⁇ ⁈ ⁉ */
	case 0x2025: case 0x2026: /* ‥ … */
	case 0x3002: case 0xff61: /* 。 ｡ */
	case 0xff01: case 0xff1f: /* ！ ？ */
		return MARK;
	case 0xff0e: /* ． */
		return POINT;
	case 0x0085: case 0x00a0: case 0x1680: case 0x2000 ... 0x200a: case 0x2028: case 0x2029: case 0x202f: case 0x205f:
	case 0x3000:
		return SPACE;
	case 0x00ab: case 0x00bb: case 0x2018: case 0x2019: case 0x201c: case 0x201d: case 0x2039: case 0x203a: /* quotes */
	case 0x3009: case 0x300b: case 0x300d: case 0x300f: case 0x3011: case 0x3015: case 0x3017: case 0x3019: case 0x301b:
	case 0x301e: case 0x301f: /* 〞 〟 */
	case 0xff02: case 0xff07: /* ＂ ＇ */
	case 0xff09: case 0xff3d: case 0xff5d: case 0xff60: case 0xff63: /* ） ］ ｝ ｠ ｣ */
		return CLOSER;
	case 0xff10 ... 0xff19: case 0xff21 ... 0xff3a: case 0xff41 ... 0xff5a: /* full-width digits and Latin */
	case 0xd800 ... 0xdfff: case 0xfffd: /* no character, or a sign for that */
		return PLAIN;
	default:
		return point >= 0x2000 || point < 0xc0 ? WIDE : PLAIN;
	}
}

/* What the text so far came to; the values are where the moves below have their fields */
enum {
	FIELD = 6, /* bits */
	WITHIN = 0, /* no sentence has ended */
	DOT = FIELD, /* a point: what follows tells */
	DOTS = 2 * FIELD, /* two */
	ENDED = 3 * FIELD, /* and what is right after may belong to it */
	OVER = 4 * FIELD, /* ended, and then white space */
	UNKNOWN = 5 * FIELD, /* not told by what was looked at: never kept */
};

#define MOVES(within, dot, dots, ended, over, unknown)                                                          \
	((uint64_t)(within) << WITHIN | (uint64_t)(dot) << DOT | (uint64_t)(dots) << DOTS |                     \
	 (uint64_t)(ended) << ENDED | (uint64_t)(over) << OVER | (uint64_t)(unknown) << UNKNOWN)

/* What a character of each kind makes of it: in a register, so that a step is a shift and no load that waits for one */
static const uint64_t moves[] = {
	/* from:         WITHIN  DOT      DOTS     ENDED    OVER     UNKNOWN */
	[PLAIN] = MOVES(WITHIN, WITHIN, WITHIN, WITHIN, WITHIN, WITHIN),
	[WIDE] = MOVES(WITHIN, WITHIN, WITHIN, WITHIN, WITHIN, WITHIN),
	[SPACE] = MOVES(WITHIN, OVER, OVER, OVER, OVER, UNKNOWN),
	[CLOSER] = MOVES(WITHIN, ENDED, ENDED, ENDED, OVER, UNKNOWN),
	[POINT] = MOVES(DOT, DOTS, ENDED, ENDED, DOT, UNKNOWN),
	[MARK] = MOVES(ENDED, ENDED, ENDED, ENDED, ENDED, ENDED),
	[PART] = MOVES(UNKNOWN, UNKNOWN, UNKNOWN, UNKNOWN, UNKNOWN, UNKNOWN),
	[MISSING] = MOVES(WITHIN, DOT, DOTS, ENDED, OVER, UNKNOWN),
};

/* Is a token HIGH that starts with this kind? */
static const uint64_t highs[] = {
	[PLAIN] = MOVES(0, 0, 0, 1, 1, 0),
	[WIDE] = MOVES(0, 1, 1, 1, 1, 0),
	[SPACE] = MOVES(0, 1, 1, 1, 1, 0),
	[CLOSER] = MOVES(0, 1, 1, 1, 1, 0),
	[POINT] = MOVES(0, 0, 0, 0, 1, 0),
	[MARK] = MOVES(0, 0, 0, 0, 1, 0),
	[PART] = 0,
};

static uint8_t next_after(uint8_t after, uint8_t kind)
{
	return moves[kind] >> after & ((1 << FIELD) - 1);
}

static uint8_t class_of(uint8_t after, uint8_t first)
{
	return (uint8_t)(CLAW_NORMAL - (highs[first] >> after & 1));
}

/*
 * May this byte be the next of the character in progress? As a second byte some may not: 80–9f after e0, 80–8f after f0,
 * 90–bf after f4; that is seen by `point`. Surrogates, a0–bf after ed, are found out when whole, as by Python's decoder.
 */
static int goes_on(const struct claw_text *text, uint8_t byte)
{
	uint32_t point = text->point << 6 | (byte & 0x3f);
	if (byte_kinds[byte] != PART)
		return 0;
	if (text->more == 2)
		return point >= 0x20;
	if (text->more == 3)
		return point >= 0x10 && point < 0x110;
	return 1;
}

static void step(struct claw_text *text, uint8_t byte)
{
	uint8_t kind = byte_kinds[byte];
	if (text->more && goes_on(text, byte)) {
		text->point = text->point << 6 | (byte & 0x3f);
		if (!--text->more)
			*text = (struct claw_text){ .after = next_after(text->after, kind_of(text->point)) };
		return;
	}
	uint8_t after = text->more ? (uint8_t)WITHIN : text->after; /* broken off: that counts as a letter */
	uint8_t more = (kind & MORE) >> MORE_SHIFT;
	if (more)
		*text = (struct claw_text){
			.point = byte & (0x3f >> more),
			.after = after,
			.more = more,
			.likely = kind & SEEMS_WIDE ? WIDE : PLAIN,
		};
	else
		*text = (struct claw_text){ .after = kind == PART ? (uint8_t)WITHIN : next_after(after, kind) };
}

/* The kind of the character that is in progress, or else of the next; a guess when it is not whole yet */
static uint8_t first_kind(struct claw_text text, const uint8_t *data, uint32_t len)
{
	uint32_t at = 0;
	if (!text.more) {
		uint8_t kind = byte_kinds[data[0]];
		if (!(kind & MORE))
			return kind == PART ? (uint8_t)PLAIN : kind;
		step(&text, data[at++]);
	}
	for (; at < len; at++) {
		if (!goes_on(&text, data[at]))
			return PLAIN;
		if (text.more == 1)
			return kind_of(text.point << 6 | (data[at] & 0x3f));
		step(&text, data[at]);
	}
	return text.likely;
}

/* The kind of what looks like a character of 1 + more bytes; of content, PLAIN will do */
static uint8_t whole_kind(const uint8_t *data, uint32_t more)
{
	static const uint32_t lowest[] = { 0, 0x80, 0x800, 0x10000 };
	uint8_t kind = byte_kinds[data[0]];
	if (!more || kind & CONTENT)
		return more ? (uint8_t)PLAIN : kind;
	uint32_t point = data[0] & (0x3f >> more);
	for (uint32_t i = 1; i <= more; i++)
		point = point << 6 | (data[i] & 0x3f);
	return point < lowest[more] ? (uint8_t)PLAIN : kind_of(point);
}

/*
 * Where to start, and with what, to have the same at the end of the data as from its beginning on: after the last whole
 * character that leaves the same behind whatever was before it, which is any but SPACE, CLOSER and POINT. A first byte
 * breaks off whatever was in progress, so the way back needs no more than it finds. Bytes that make no character but
 * look like one are content as well: the same as PLAIN. Usually that is the last or last but one character.
 */
static uint32_t anchor(struct claw_text *text, const uint8_t *data, uint32_t len)
{
	uint32_t continued = 0; /* bytes right after data + at that are PART and no first ones */
	for (uint32_t at = len; at--;) {
		uint8_t kind = byte_kinds[data[at]];
		if (kind == PART) {
			continued++;
			continue;
		}
		uint32_t more = (kind & MORE) >> MORE_SHIFT;
		if (continued >= more) {
			uint8_t after = next_after(UNKNOWN, whole_kind(data + at, more));
			if (after != UNKNOWN) {
				*text = (struct claw_text){ .after = after };
				return at + 1 + more;
			}
		}
		continued = 0;
	}
	return 0;
}

/* Out of line: it must not cost the usual way any registers */
static __attribute__((noinline)) uint8_t take(struct claw_text *text, const uint8_t *data, uint32_t len)
{
	uint8_t klass = text->after ? class_of(text->after, first_kind(*text, data, len)) : CLAW_NORMAL;
	for (uint32_t at = anchor(text, data, len); at < len; at++)
		step(text, data[at]);
	return klass;
}

/*
 * The last four bytes tell what most tokens leave, and the first one the class; without a branch on what they are, as
 * where the spaces and points are is hard to predict. What those do not tell, take() finds out.
 */
uint8_t claw_text_class(struct claw_text *text, const uint8_t *data, uint32_t len)
{
	if (!len)
		return CLAW_NORMAL;
	uint8_t first = byte_kinds[data[0]] & KIND;
	uint8_t last = byte_kinds[data[len - 1]] & KIND;
	uint8_t second = len > 1 ? byte_kinds[data[len - 2]] & KIND : MISSING;
	uint8_t third = len > 2 ? byte_kinds[data[len - 3]] & KIND : MISSING;
	uint8_t fourth = len > 3 ? byte_kinds[data[len - 4]] & KIND : MISSING;
	uint8_t after = len > 4 ? (uint8_t)UNKNOWN : text->after;
	after = next_after(next_after(next_after(next_after(after, fourth), third), second), last);
	if (after == UNKNOWN || text->more || (text->after && first == PART))
		return take(text, data, len);
	uint8_t klass = class_of(text->after, first);
	text->after = (uint8_t)after;
	return klass;
}

int claw_is_text(const uint8_t *text, uint32_t len)
{
	uint32_t at = 0;
	while (at < len) {
		uint8_t lead = text[at++];
		uint32_t more, lowest;
		if (lead < 0x80) {
			if (lead < 0x20 || lead == 0x7f)
				return 0;
			continue;
		}
		if ((lead & 0xe0) == 0xc0)
			more = 1, lowest = 0x80;
		else if ((lead & 0xf0) == 0xe0)
			more = 2, lowest = 0x800;
		else if ((lead & 0xf8) == 0xf0)
			more = 3, lowest = 0x10000;
		else
			return 0;
		if (len - at < more)
			return 0;
		uint32_t point = lead & (0x3f >> more);
		for (; more; more--) {
			if ((text[at] & 0xc0) != 0x80)
				return 0;
			point = point << 6 | (text[at++] & 0x3f);
		}
		if (point < lowest || point > 0x10ffff || (point >= 0xd800 && point < 0xe000))
			return 0;
	}
	return 1;
}
