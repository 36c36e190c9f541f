# SPDX-License-Identifier: Apache-2.0
"""A producer or consumer in a namespace of its own: caged.py write|read RUNTIME_DIR STREAM. Tells what it can see."""

import json
import os
import sys

what, runtime_dir, stream = sys.argv[1:]
seen = {"pid": os.getpid(), "shm": os.listdir("/dev/shm"), "root": sorted(os.listdir("/"))}

if what == "write":
    from clawd.producer import Producer

    with Producer("caged", runtime_dir) as producer:
        left = producer.open(f"{stream}-left")
        left.write("never closed")
        whole = producer.open(stream)
        for text in ("out of ", "the ca", "ge 🦞"):
            whole.write(text)
        whole.close("stop")
        print(json.dumps(seen), flush=True)
        sys.stdin.read()
else:
    from clawd.consumer import Consumer

    with Consumer(runtime_dir) as consumer:
        reading = consumer.attach(stream)
        text = "".join(token.text for token in reading)
        print(json.dumps({**seen, "text": text, "end": reading.end_reason}), flush=True)
        sys.stdin.read()
