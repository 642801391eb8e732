/* Any text as a file of tokens: it is refused, or each of its tokens has a
 * role, and no error shows it. */
#include <stdlib.h>
#include <string.h>

#include "rpc/access.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void require(int true_of_all_inputs)
{
    if (!true_of_all_inputs)
        abort();
}

static int has_any(void *ctx, const char *name)
{
    (void)ctx;
    return name[0] != 0;
}
static const rpc_peer any = {has_any, NULL};

/* Each word of the text as a token, and then a certificate. */
static void look_for(const access_list *a, const char *text)
{
    static const char space[] = " \t\r\n";
    while (*text) {
        const size_t n = strcspn(text, space);
        enum rpc_reason why;
        const rpc_who *who =
            access_find(a, text, n, &any, 1000000000, &why);
        require(!who || (who->roles && who->roles <= RPC_ALL &&
                         who->name[0] && n >= 16));
        if (who)
            (void)persia_rpc_tables(who, "ads_of_today");
        text += n + strspn(text + n, space);
    }
    enum rpc_reason why;
    const rpc_who *who = access_find(a, NULL, 0, &any, 1000000000, &why);
    require(!who || who->name[0]);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    char *text = malloc(size + 1);
    access_list *a;
    require(text != NULL);
    memcpy(text, data, size);
    text[size] = 0;
    const int rc = access_make(&(rpc_security){.tokens = text}, NULL, &a);
    require(rc == PERSIA_OK || rc == PERSIA_EARG);
    require((rc == PERSIA_OK) == (a != NULL));
    if (a)
        look_for(a, text);
    access_drop(a);
    free(text);
    return 0;
}
