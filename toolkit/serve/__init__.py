"""The HTTP server: OpenAI's API and the KServe v2 protocol in front of one engine, which runs in a process of its own.

    options    what the server is told
    wire       messages between the two processes: length-prefixed JSON over a socket pair, no pickle
    cork       what one turn of the event loop writes leaves as one send
    worker     the engine process: reads messages, steps the loop, writes events
    client     the front end's side: tickets, aborts, the watchdog
    protocol   requests as records; an unknown field is an error that names it
    gate       Host, API key, sizes: what is checked before anything is parsed
    patience stalled   how long a client may take to send its body, and to take its answer
    chat tools text   from messages to token ids, and from tokens to what is answered
    openai kserve   the two protocols
    routes app kserve_routes   where each request goes
    metrics server   Prometheus figures, and a stop that drains
"""
