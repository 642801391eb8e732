/* tsan.c: what ThreadSanitizer must know; linked to every test of its build.
 *
 * gRPC and what it stands on are not instrumented: their locks and atomics
 * are not seen, so that all their threads seem to race with each other.  What
 * they do themselves is not looked at, nor is a race of theirs with ours (the
 * call object they free is the one that we gave back).  Races of our code
 * with our code are reported, also where gRPC handed something over.
 */
__attribute__((visibility("default"))) const char *
__tsan_default_options(void);

const char *__tsan_default_options(void)
{
    return "ignore_noninstrumented_modules=1";
}

__attribute__((visibility("default"))) const char *
__tsan_default_suppressions(void);

const char *__tsan_default_suppressions(void)
{
    return "race:libgrpc.so\n";
}
