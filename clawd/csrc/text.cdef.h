/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Text classes: is a token HIGH, because a sentence ended before it, or NORMAL? Nothing is looked ahead at: a class
 * follows from the text before the token and from the token's own first character.
 *
 * What ends a sentence:
 *   marks   ! ?  and full-width ！ ？ 。 ｡ (half-width katakana's), … ‥ (both also doubled), ⁇ ⁈ ⁉ ‼ ‽, and those of Arabic
 *           and Urdu ؟ ۔ and of Indic scripts । ॥. A sentence may go on after them; then HIGH was worth nothing, and no harm.
 *           Three points or more are an ellipsis, so a mark.
 *   points  . and full-width ．, one or two of them: numbers, names and abbreviations have them too. Only if white space,
 *           a closer or a character that words are not made of follows (any from U+2000 on: 中, emoji; or ¡ … ¿). So not
 *           in 3.14, 1,234.56, v1.2, e.g, example.com, ../a, also when cut there. "e.g. this" is taken for an end, and
 *           so is "1. One": abbreviations are not known, and what follows the space is too late to ask.
 *
 * What is looked through on the way to the next sentence: white space (Unicode's property, full-width and no-break
 * included) and closers, which are ) ] } and their full-width and East Asian kin ） ］ ｝ ｠ ｣ 〉 》 」 』 】 〕 〗 〙 〛, quotes
 * " ' ＂ ＇ “ ” ‘ ’ « » ‹ › 〞 〟 (which side closes differs by language), and * (Markdown's emphasis).
 *
 * HIGH are all tokens up to the one with the first character of the next sentence; all parts of that character, because
 * no reader sees half of one. Not HIGH is a token that starts with a mark or a point right after another (closers
 * between or not): it still belongs to the sentence that ends. Of a character that the token has in part, the first
 * byte must do. An empty token is NORMAL and changes nothing.
 *
 * Bytes that are no UTF-8 are U+FFFD, one for each part that decoders replace by one; and that counts as a letter.
 */
struct claw_text {
	uint32_t point; /* of the character in progress: the bits so far */
	uint8_t after; /* what the whole characters before it came to; 0 at the start of a text */
	uint8_t more; /* bytes it still lacks, 0 = none is in progress */
	uint8_t likely; /* what its first byte tells */
	uint8_t reserved;
};

/* Class of the next token of a text, and move on past it: CLAW_HIGH or CLAW_NORMAL. */
uint8_t claw_text_class(struct claw_text *text, const uint8_t *data, uint32_t len);
