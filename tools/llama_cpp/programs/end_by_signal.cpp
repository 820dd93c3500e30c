// Linked into a server that runs until a signal: the server then exits normally, so that backends print their
// statistics.

#include <csignal>
#include <cstdlib>

static const auto registered = std::signal(SIGTERM, [](int) { std::exit(0); });
