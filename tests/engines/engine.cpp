/* SPDX-License-Identifier: Apache-2.0 */
/*
 * An inference engine in C++17: engine RUNTIME_DIR PREFIX STREAMS TOKENS RING_BYTES OVERFLOW_BYTES
 *
 * Does what engine.c does, through two small classes to take along: they own the ring and turn results into exceptions.
 */
#include "clawd_ring.h"

#include <cstdlib>
#include <iostream>
#include <memory>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

using namespace std::literals;

namespace {

constexpr uint64_t patience_ns = 20'000'000'000;

/* A ring: one thread at a time, as claw_producer itself */
class Producer {
public:
	Producer(const std::string &runtime_dir, const std::string &name, uint64_t ring_bytes = 0,
		 uint64_t overflow_bytes = CLAW_OVERFLOW_BYTES)
	{
		claw_attached answer;
		int result = claw_attach(ring(), runtime_dir.c_str(), name.c_str(), ring_bytes, &answer);

		if (result < 0)
			throw std::runtime_error("cannot attach: "s +
						 (answer.status ? answer.text : claw_result_text(result)));
		checked(claw_set_overflow(ring(), overflow_bytes));
	}

	~Producer()
	{
		claw_detach(ring());
	}

	Producer(const Producer &) = delete;
	Producer &operator=(const Producer &) = delete;

	claw_stream open(std::string_view name)
	{
		claw_stream stream{};

		retry(ring()->record_max, [&] {
			return claw_open_stream(ring(), name.data(), name.size(), nullptr, 0, claw_now_ns(), &stream);
		});
		return stream;
	}

	/* False: the stream was stopped, the text is dropped */
	bool write(claw_stream stream, std::string_view text, uint32_t flags = 0)
	{
		return retry(bytes_of(text), [&] {
			return claw_write(ring(), stream, text.data(), text.size(), flags, 1);
		}) != -ECANCELED;
	}

	/* A step: text i is the next lens[i] bytes of `texts` */
	void write_many(const std::vector<claw_stream> &streams, const std::vector<uint32_t> &lens, std::string_view texts)
	{
		uint64_t bytes = 0;
		size_t at = 0;

		for (uint32_t len : lens) {
			bytes += bytes_of(texts.substr(at, len));
			at += len;
		}
		retry(bytes, [&] {
			return claw_write_many(ring(), streams.data(), lens.data(), texts.data(),
					       static_cast<uint32_t>(lens.size()), 0, 1);
		});
	}

	void close(claw_stream stream, std::string_view reason)
	{
		retry(claw_record_bytes(reason.size()), [&] {
			return claw_close_stream(ring(), stream, reason.data(), reason.size());
		});
	}

	/* At the end: what found no room in the ring would end with this process */
	void flush()
	{
		while (checked(claw_flush(ring())) > 0)
			checked(claw_wait_room(ring(), claw_record_bytes(ring()->record_max), patience_ns));
	}

	/* CLAW_STOPPED_…, 0 = not */
	int stopped(claw_stream stream) const
	{
		return checked(claw_stopped(ring_.get(), stream));
	}

private:
	claw_producer *ring()
	{
		return ring_.get();
	}

	uint64_t bytes_of(std::string_view text) const
	{
		return claw_text_bytes(ring_.get(), text.data(), text.size());
	}

	static int checked(int result)
	{
		if (result < 0 && result != -ECANCELED)
			throw std::runtime_error(claw_result_text(result));
		return result;
	}

	template <typename Call> int retry(uint64_t bytes, Call call)
	{
		int result = call();

		while (result == -EAGAIN && claw_wait_room(ring(), bytes, patience_ns) == 0)
			result = call();
		return checked(result);
	}

	std::unique_ptr<claw_producer> ring_{ new claw_producer() }; /* zeroed; too large for the stack */
};

/* One answer and the model that makes it up: a token is some bytes, and may end inside a character */
class Answer {
public:
	Answer(Producer &producer, const std::string &prefix, int index)
		: name(prefix + "-" + std::to_string(index)), stream(producer.open(name)), index_(index)
	{
	}

	std::string_view make_token(int step)
	{
		std::string_view token = prose.substr(at_, static_cast<size_t>(1 + (step * 7 + index_ * 3) % 6));

		at_ = (at_ + token.size()) % prose.size();
		return token;
	}

	void close(Producer &producer, std::string_view reason)
	{
		producer.close(stream, reason);
		std::cout << name << ' ' << reason << '\n';
		is_over = true;
	}

	const std::string name;
	const claw_stream stream;
	bool is_over = false;

private:
	static constexpr auto prose = "The ring is full; 环形缓冲区已满，请稍候。 Ёмкость 0123456789 🦞 naïve ∑"sv;
	int index_;
	size_t at_ = 0;
};

/* Returns how many answers are not over */
int make_step(Producer &producer, std::vector<Answer> &answers, int step)
{
	std::vector<claw_stream> streams;
	std::vector<uint32_t> lens;
	std::string texts;
	int live = 0;

	for (Answer &answer : answers) {
		if (answer.is_over)
			continue;
		if (int stopped = producer.stopped(answer.stream)) {
			answer.close(producer, claw_stopped_text(stopped));
			continue;
		}
		live++;
		std::string_view token = answer.make_token(step);
		if (step % 16 == 15) {
			producer.write(answer.stream, token, CLAW_URGENT);
			continue;
		}
		streams.push_back(answer.stream);
		lens.push_back(static_cast<uint32_t>(token.size()));
		texts += token;
	}
	producer.write_many(streams, lens, texts);
	return live;
}

void run(const std::vector<std::string> &arguments)
{
	Producer producer(arguments[0], "engine in C++", std::stoull(arguments[4]), std::stoull(arguments[5]));
	std::vector<Answer> answers;

	for (int i = 0; i < std::stoi(arguments[2]); i++)
		answers.emplace_back(producer, arguments[1], i);
	for (int step = 0; step < std::stoi(arguments[3]); step++)
		if (!make_step(producer, answers, step))
			break;
	for (size_t i = 0; i < answers.size(); i++)
		if (!answers[i].is_over)
			answers[i].close(producer, i % 2 ? "length" : "stop");
	producer.flush();
}

} /* namespace */

int main(int argc, char **argv)
{
	if (argc != 7) {
		std::cerr << "usage: engine RUNTIME_DIR PREFIX STREAMS TOKENS RING_BYTES OVERFLOW_BYTES\n";
		return 2;
	}
	try {
		run({ argv + 1, argv + argc });
	} catch (const std::exception &error) {
		std::cerr << "engine: " << error.what() << '\n';
		return 1;
	}
	return 0;
}
