/* A wrong time of day for the programs that load this (LD_PRELOAD), by $SKYWARD_TESTS_CLOCK_S seconds.

   Not libfaketime: it has the monotonic clock wrong too, or else refuses sleeps that end at a time of that clock.
   No headers, and nothing but what the C library of the host has: a compiler is all it takes to make it. */

struct timespec { long seconds, nanoseconds; };
struct timeval { long seconds, microseconds; };

extern long syscall(long number, ...);
extern char *getenv(const char *name);
extern long atol(const char *digits);

#if defined(__x86_64__)
#define CLOCK_GETTIME 228
#elif defined(__aarch64__)
#define CLOCK_GETTIME 113
#endif
#define REALTIME 0
#define REALTIME_COARSE 5

static long offset;

__attribute__((constructor)) static void read_offset(void)
{
    const char *digits = getenv("SKYWARD_TESTS_CLOCK_S");
    offset = digits ? atol(digits) : 0;
}

int clock_gettime(int clock, struct timespec *now)
{
    long code = syscall(CLOCK_GETTIME, (long)clock, now);
    if (code == 0 && (clock == REALTIME || clock == REALTIME_COARSE))
        now->seconds += offset;
    return (int)code;
}

int gettimeofday(struct timeval *now, void *zone)
{
    struct timespec precise;
    (void)zone;
    clock_gettime(REALTIME, &precise);
    now->seconds = precise.seconds;
    now->microseconds = precise.nanoseconds / 1000;
    return 0;
}

long time(long *now)
{
    struct timespec precise;
    clock_gettime(REALTIME, &precise);
    if (now)
        *now = precise.seconds;
    return precise.seconds;
}
